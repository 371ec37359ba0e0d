"""`python -m oomph` is the command `oomph`."""

import sys

from oomph.cli.main import main

sys.exit(main())
