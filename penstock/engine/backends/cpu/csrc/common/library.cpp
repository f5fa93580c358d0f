// What a library has once, whatever instruction sets are in it: which of them this CPU runs, and the layout of structs.

#include <cstddef>
#include <cstdio>

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "common/arguments.h"
#include "common/export.h"

namespace {

// Words in a buffer that stays.
struct Text {
    char at[8192] = "";
    size_t used = 0;
    __attribute__((noinline)) void word(const char* name, const char* before = " ") {
        used += size_t(std::snprintf(at + used, sizeof at - used, "%s%s", used ? before : "", name));
    }
    __attribute__((noinline)) void number(size_t n) {
        used += size_t(std::snprintf(at + used, sizeof at - used, "%zu", n));
    }
    __attribute__((noinline)) void field(const char* name, size_t offset) {
        word(name);
        word("", ":");
        number(offset);
    }
};


#if defined(__aarch64__)

bool has_dotprod() {
#if defined(__linux__)
    constexpr unsigned long kHalfVectors = 1ul << 10, kDotProducts = 1ul << 20;  // HWCAP_ASIMDHP, HWCAP_ASIMDDP
    return (getauxval(AT_HWCAP) & (kHalfVectors | kDotProducts)) == (kHalfVectors | kDotProducts);
#elif defined(__APPLE__)
    return true;  // every Apple CPU since the M1
#else
    return false;
#endif
}

void write_runnable_sets(Text& to) {
    if (has_dotprod()) to.word("dotprod");
    to.word("neon");
    to.word("generic");
}

#elif defined(__x86_64__)

struct Registers {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Zeros where the CPU does not have the leaf. Older compilers' own tables of features lack what is asked for here.
Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r;
    if (leaf <= __get_cpuid_max(0, nullptr)) __cpuid_count(leaf, subleaf, r.eax, r.ebx, r.ecx, r.edx);
    return r;
}

// Linux grants tile registers per process, on request.
bool tiles_granted() {
#if defined(__linux__)
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
    return false;
#endif
}

void write_runnable_sets(Text& to) {
    __builtin_cpu_init();
    const Registers base = cpuid(1, 0), more = cpuid(7, 0), newest = more.eax >= 1 ? cpuid(7, 1) : Registers();
    const auto bit = [](unsigned word, int n) { return bool(word >> n & 1); };
    // These also ask the operating system whether it saves the registers.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                      __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") && bit(base.ecx, 29);  // F16C
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512cd");
    const bool vnni = avx512 && bit(more.ecx, 11), bf16 = vnni && bit(newest.eax, 5), vbmi = bit(more.ecx, 1);
    const bool tiles = bit(more.edx, 24) && bit(more.edx, 22) && bit(more.edx, 25);  // TILE, BF16, INT8
    if (bf16 && vbmi && tiles && tiles_granted()) to.word("amx");
    if (bf16) to.word("avx512bf16");
    if (vnni) to.word("avx512vnni");
    if (avx512) to.word("avx512");
    if (avx2 && bit(newest.eax, 4)) to.word("avxvnni");
    if (avx2) to.word("avx2");
    to.word("generic");
}

#else

void write_runnable_sets(Text& to) { to.word("generic"); }

#endif

}  // namespace

// The instruction sets that this CPU runs, best first, whether or not this library contains them. The first call asks for
// what the operating system grants on request only.
PK_API const char* pk_runnable_sets() {
    static const Text text = [] {
        Text sets;
        write_runnable_sets(sets);
        return sets;
    }();
    return text.at;
}

// What the compiler made of arguments.def: a line per struct, "name bytes field:offset ...".
PK_API const char* pk_layouts() {
    static const Text text = [] {
        Text out;
#define PK_STRUCT(name)            \
    {                              \
        using Struct = name;       \
        out.word(#name, "\n");     \
        out.word("");              \
        out.number(sizeof(Struct));
#define PK_FIELD(type, name) out.field(#name, offsetof(Struct, name));
#define PK_ARRAY(type, name, length) PK_FIELD(type, name)
#define PK_END(name) }
#include "common/arguments.def"
        return out;
    }();
    return text.at;
}
