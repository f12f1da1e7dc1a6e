"""Decisions with the strongest rows out of sight, against as many random ones, in both states of the cache.

python paper_figures/fig_knockout.py SWEEP [--out DIR]
"""

from notelens.report.experiments import experiment_command

if __name__ == "__main__":
    print(*experiment_command("knockout", __doc__), sep="\n")
