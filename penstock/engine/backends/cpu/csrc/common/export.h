// Names of the functions that Python calls. Each instruction set has its own copy of every function, with the name of the
// set behind it: `pk_linear` is `pk_linear_avx2` in the code for AVX2. Python picks the set when it loads the library.

#pragma once

#define PK_API extern "C" __attribute__((visibility("default")))
#define PK_JOIN_EXPANDED(name, set) name##_##set
#define PK_JOIN(name, set) PK_JOIN_EXPANDED(name, set)
#define PK_OF_SET(name) PK_JOIN(name, PK_SET)
#define PK_FUNCTION(result, name) PK_API result PK_OF_SET(name)
