"""Run by each rank of `keras_dist.run`: call the function, and write its result."""

import os
import pickle
import sys
from pathlib import Path

from keras_dist.launch.function import write

if __name__ == "__main__":
    call, *results = sys.argv[1:]
    function, args, kwargs = pickle.loads(Path(call).read_bytes())
    write(results[int(os.environ["HOROVOD_RANK"])], function(*args, **kwargs))
