"""What lives in a Ray process: thin shells around `dspark` functions."""
