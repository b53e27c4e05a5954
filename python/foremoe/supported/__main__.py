"""python -m foremoe.supported: prints the table of versions of docs/users/adopting.md."""

from foremoe.supported import table

print(table())
