"""Model files for devices: kept by content (`store`), served over HTTP (`door`), taken in from operators (`intake`)."""
