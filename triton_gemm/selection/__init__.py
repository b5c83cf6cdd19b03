"""Selection: which kernel, tiles and splitting a GEMM gets, by predicted time alone. Nothing here touches a GPU."""
