"""Figure 1: recovery of every set of patched rows, with intervals, n and the range of the paper.

python paper_figures/fig_recovery.py RUN [--out DIR]
"""

from notelens.report.figures import figure_command

if __name__ == "__main__":
    print(*figure_command("recovery", __doc__), sep="\n")
