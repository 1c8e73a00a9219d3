"""`python -m eyas`."""

import sys

from eyas.cli import main

sys.exit(main())
