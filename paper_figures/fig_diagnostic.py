"""Figure of the diagnostic: predicted against true recovery of an in-place refresh.

python paper_figures/fig_diagnostic.py RUN [--out DIR]
"""

import argparse
from pathlib import Path

from notelens.errors import NotelensError
from notelens.report import style
from notelens.report.calibration import draw_calibration
from notelens.report.figures import FOLDER
from notelens.runs.records import read_records

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run of experiments.diagnostic")
    parser.add_argument("--out", type=Path, help="folder for the files (default: RUN/figures)")
    given = parser.parse_args()
    try:
        figure = draw_calibration(read_records(given.run))
        print(*style.save(figure, given.out or given.run / FOLDER, "diagnostic"), sep="\n")
    except NotelensError as error:
        parser.error(str(error))
