"""What a rank of `keras_dist.run` runs: it calls the function, and keeps the result."""

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
