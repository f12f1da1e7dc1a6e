"""Recovery by the share of the suffix that is patched, from the back, from the front and at random.

python paper_figures/fig_suffix.py SWEEP [--out DIR]
"""

from notelens.report.experiments import experiment_command

if __name__ == "__main__":
    print(*experiment_command("suffix", __doc__), sep="\n")
