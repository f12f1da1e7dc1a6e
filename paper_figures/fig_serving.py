"""Figure of a serving benchmark: time to the first token against the offered load, by where the changing field stands.

python paper_figures/fig_serving.py RUN [--out DIR]
python paper_figures/fig_serving.py records/serve-smollm2.json --out DIR
"""

import argparse
import json
from pathlib import Path

from notelens.errors import NotelensError
from notelens.report import style
from notelens.report.figures import FOLDER
from notelens.report.serving import draw_serving
from notelens.runs.serve_tables import serve_table

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder that 'notelens serve-bench' wrote to, or its table as JSON")
    parser.add_argument("--out", type=Path, help="folder for the files (default: RUN/figures; needed with a table)")
    given = parser.parse_args()
    if given.run.is_file() and given.out is None:
        parser.error("a table needs --out, the folder for the files")
    try:
        if given.run.is_file():
            figure = draw_serving(json.loads(given.run.read_text(encoding="utf-8")), given.run.stem)
        else:
            table = serve_table(given.run)
            figure = draw_serving(table.rows, table.title)
        print(*style.save(figure, given.out or given.run / FOLDER, "ttft"), sep="\n")
    except NotelensError as error:
        parser.error(str(error))
