// The integer kernels without VNNI, of AVX2 and, with wider vectors, of AVX-512 BW (see ../integer/choose.h).
#pragma once

#include "../integer/choose.h"
#include "hybrid_values.h"
#include "polar_keys.h"
#include "sign_sums.h"
#include "token_values.h"
#include "../integer/table.h"
