"""stub"""


def select_panels(rows, lines):
    return [], 0
