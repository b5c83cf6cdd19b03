// The unit of torch's dispatcher and derivatives; it includes no header of pybind11.
#include "derivatives.h"
#include "products.h"
