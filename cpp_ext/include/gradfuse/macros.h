#pragma once

#define GRADFUSE_INLINE inline __attribute__((always_inline))
