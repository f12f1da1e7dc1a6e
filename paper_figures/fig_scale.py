"""Where notes begin: headline metrics over widths and depths of one family.

python paper_figures/fig_scale.py SWEEP [--out DIR]
"""

from notelens.report.experiments import experiment_command

if __name__ == "__main__":
    print(*experiment_command("scale", __doc__), sep="\n")
