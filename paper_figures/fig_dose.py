"""Place of the field and number of notes.

python paper_figures/fig_dose.py SWEEP [--out DIR]
"""

from notelens.report.experiments import experiment_command

if __name__ == "__main__":
    print(*experiment_command("dose", __doc__), sep="\n")
