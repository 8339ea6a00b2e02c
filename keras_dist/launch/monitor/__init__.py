"""Detect ranks that wait forever, and record where each rank is. Needs no TensorFlow.

- `record`: where this rank is (epoch, step, collective), readable by other processes
- `watchdog`: a thread that ends the job if no rank makes progress, by the heartbeats;
  why a rank has ended, for those that wait for it
- `rank_process`: runs the user's script in a rank of `keras-dist run`, and ends what it
  leaves; the report for the launcher if it fails; the seed of all ranks
"""
