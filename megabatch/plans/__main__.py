"""Print the table of docs/algorithms.md: `python -m megabatch.plans`."""

from megabatch.plans.price import table

print(table())
