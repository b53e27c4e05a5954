"""python -m foremoe.report INPUT --cluster NAME --out page.html"""

import sys

from .command import main

sys.exit(main(sys.argv[1:]))
