"""Print the table of docs/algorithms.md: `python -m megabatch.plans`."""

from megabatch.plans.traffic import table

print(table())
