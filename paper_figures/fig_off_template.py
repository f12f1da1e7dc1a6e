"""Other kinds of prompts: competence, field against notes, delimiters against their base rate.

python paper_figures/fig_off_template.py SWEEP [--out DIR]
"""

from notelens.report.experiments import experiment_command

if __name__ == "__main__":
    print(*experiment_command("off_template", __doc__), sep="\n")
