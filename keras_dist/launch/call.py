"""Run by each rank of `keras_dist.run`: call the function, and write its result."""

import os
import pickle
import sys
from pathlib import Path

from keras_dist.launch.function import CALL, RESULT, write

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    function, args, kwargs = pickle.loads((folder / CALL).read_bytes())
    name = RESULT.format(rank=os.environ["HOROVOD_RANK"])
    write(folder / name, function(*args, **kwargs))
