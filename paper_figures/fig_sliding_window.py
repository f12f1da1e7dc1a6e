"""Behind the window: locality, specificity and injection where the field has left the window of most layers.

python paper_figures/fig_scale.py SWEEP [--out DIR]
"""

from notelens.report.experiments import experiment_command

if __name__ == "__main__":
    print(*experiment_command("sliding_window", __doc__), sep="\n")
