"""As fig_knockout.py, with rows out of sight in a third of the layers only.

python paper_figures/fig_knockout_layers.py SWEEP [--out DIR]
"""

from notelens.report.experiments import experiment_command

if __name__ == "__main__":
    print(*experiment_command("knockout_layers", __doc__), sep="\n")
