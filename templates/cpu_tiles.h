// Tiles: small float32 matrices in a thread's own memory.
#pragma once

#include "cpu_products.h"
#include "cpu_factors.h"
#include "cpu_results.h"
