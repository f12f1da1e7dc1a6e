"""Headline metrics of every model of a cross-family sweep, the paper's ranges behind them.

python paper_figures/fig_cross_family.py SWEEP [--out DIR]
"""

from notelens.report.experiments import experiment_command

if __name__ == "__main__":
    print(*experiment_command("cross_family", __doc__), sep="\n")
