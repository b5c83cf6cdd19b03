"""Which kernel, tiles and splitting a product gets, by predicted time alone. Pure: nothing here touches a GPU."""
