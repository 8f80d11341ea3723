// AVX-512 with the bfloat16 conversion of newer CPUs.
#define KVFERRY_BF16
#define KVFERRY_LEVEL avx512bf16
#define KVFERRY_KERNELS kernels_avx512bf16
#include "isa_avx512.cpp"
