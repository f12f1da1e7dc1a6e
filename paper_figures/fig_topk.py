"""Figure 2: recovery by number of patched positions, ranked ones against random ones.

python paper_figures/fig_topk.py RUN [--out DIR]
"""

from notelens.report.figures import figure_command

if __name__ == "__main__":
    print(*figure_command("topk", __doc__), sep="\n")
