"""Figure 4: prompts with every token coloured by the effect of patching it alone.

python paper_figures/fig_strip.py RUN [--out DIR]
"""

from notelens.report.figures import figure_command

if __name__ == "__main__":
    print(*figure_command("strip", __doc__), sep="\n")
