"""Which classes of tokens and regions carry the effect, against their share of the tokens.

python paper_figures/fig_token_stats.py SWEEP [--out DIR]
"""

from notelens.report.experiments import experiment_command

if __name__ == "__main__":
    print(*experiment_command("token_stats", __doc__), sep="\n")
