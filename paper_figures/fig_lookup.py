"""Looking a value up against deciding on it.

python paper_figures/fig_lookup.py SWEEP [--out DIR]
"""

from notelens.report.experiments import experiment_command

if __name__ == "__main__":
    print(*experiment_command("lookup", __doc__), sep="\n")
