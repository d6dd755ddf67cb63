"""What reads runs: their numbers side by side, what holds them back, and the page that shows it.

`view` reads the files of runs. `findings` says what limits a run and what to change. `charts` turns
a run into chart values, `svg` draws them, and `page` composes the report.
"""
