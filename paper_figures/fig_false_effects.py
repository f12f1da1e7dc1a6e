"""The blinded false-effect check: intervals of every arm, and what was judged of it.

python paper_figures/fig_false_effects.py FOLDER [--out DIR]
"""

from notelens.report.experiments import experiment_command

if __name__ == "__main__":
    print(*experiment_command("false_effects", __doc__), sep="\n")
