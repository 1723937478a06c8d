// The integer kernels of AVX-512 with VNNI and VBMI (see ../integer/choose.h).
#pragma once

#include "../integer/choose.h"
#include "hybrid_values.h"
#include "polar_keys.h"
#include "raw.h"
#include "sign_sums.h"
#include "softmax.h"
#include "token_values.h"
#include "../integer/table.h"
