"""Figure 3: accuracy of linear probes and commitment of the decision, by layer.

python paper_figures/fig_layers.py RUN [--out DIR]
"""

from notelens.report.figures import figure_command

if __name__ == "__main__":
    print(*figure_command("layers", __doc__), sep="\n")
