"""What reads runs: their numbers side by side, what holds them back, and the page that shows it.

`view` reads the files of runs, `findings` says what limits a run and what to change, `page` draws
the report, `plot` the pictures for a terminal or a README.
"""
