"""Build Horovod for the TensorFlow that is installed here."""

from keras_dist.install.build import install_horovod
from keras_dist.install.failures import InstallError

__all__ = ["InstallError", "install_horovod"]
