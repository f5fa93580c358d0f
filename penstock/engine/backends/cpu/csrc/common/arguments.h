// The structs of arguments.def in C++. They belong to no instruction set.

#pragma once

#include <cstdint>

using RecordedFunction = int(void* context, const uint64_t* words);

#define PK_STRUCT(name) struct name {
#define PK_FIELD(type, name) type name;
#define PK_ARRAY(type, name, length) type name[length];
#define PK_END(name) };
#include "common/arguments.def"
#undef PK_STRUCT
#undef PK_FIELD
#undef PK_ARRAY
#undef PK_END
