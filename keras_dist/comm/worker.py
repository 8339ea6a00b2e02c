"""The module that each rank of `keras_dist.run` runs."""

import sys

from keras_dist import comm
from keras_dist.launch.function import call_and_keep

if __name__ == "__main__":
    call_and_keep(sys.argv[1], comm.rank())
