"""`python -m rlpost`."""

import os
import sys

if __name__ == "__main__":
    # `python -m` looks where one is before it looks among the libraries: a file that is called like one would be run
    if not sys.flags.safe_path and sys.path and sys.path[0] == os.getcwd():
        here = sys.path.pop(0)
        if os.path.realpath(__file__).startswith(os.path.join(os.path.realpath(here), "")):
            sys.path.append(here)  # rlpost's own folder, which its processes need

    from rlpost.cli.main import main

    main()
