// What NVRTC knows by itself, for clang and clangd: CUDA's keywords, built-in variables, vector types
// and functions, as far as kernels use them. `fkjit clangd --write` puts it before every file. Bodies
// are left out: nothing of this is ever compiled to code.
#pragma once

#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
#define __CUDA_ARCH__ 900
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0

#define __global__
#define __device__
#define __host__
#define __constant__
#define __shared__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __CUDA_ALIGN__(bytes) __attribute__((aligned(bytes)))

// The toolkit's headers choose bodies by these.
#define NV_IF_TARGET(...)
#define NV_IF_ELSE_TARGET(...)
#define NV_DISPATCH_TARGET(...)

#define assert(condition)
#define __NV_SILENCE_DEPRECATION_BEGIN
#define __NV_SILENCE_DEPRECATION_END
enum cudaRoundMode { cudaRoundNearest, cudaRoundZero, cudaRoundPosInf, cudaRoundMinInf };

typedef __SIZE_TYPE__ size_t;
extern "C" void* memcpy(void* to, const void* from, size_t bytes);
extern "C" void* memset(void* to, int value, size_t bytes);

#define FKJIT_VECTORS(name, type, pair, quad)                         \
  struct name##1 { type x; };                                         \
  struct __attribute__((aligned(pair))) name##2 { type x, y; };       \
  struct name##3 { type x, y, z; };                                   \
  struct __attribute__((aligned(quad))) name##4 { type x, y, z, w; }; \
  name##1 make_##name##1(type x);                                     \
  name##2 make_##name##2(type x, type y);                             \
  name##3 make_##name##3(type x, type y, type z);                     \
  name##4 make_##name##4(type x, type y, type z, type w);
FKJIT_VECTORS(char, signed char, 2, 4)
FKJIT_VECTORS(uchar, unsigned char, 2, 4)
FKJIT_VECTORS(short, short, 4, 8)
FKJIT_VECTORS(ushort, unsigned short, 4, 8)
FKJIT_VECTORS(int, int, 8, 16)
FKJIT_VECTORS(uint, unsigned int, 8, 16)
FKJIT_VECTORS(longlong, long long, 16, 16)
FKJIT_VECTORS(ulonglong, unsigned long long, 16, 16)
FKJIT_VECTORS(float, float, 8, 16)
FKJIT_VECTORS(double, double, 16, 16)

struct double4_16a : double4 {};
struct double4_32a : double4 {};

struct dim3 {
  unsigned int x = 1, y = 1, z = 1;
};
extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// Synchronisation and votes.
void __syncthreads();
int __syncthreads_and(int);
int __syncthreads_or(int);
int __syncthreads_count(int);
void __syncwarp(unsigned mask = 0xffffffffu);
void __threadfence();
void __threadfence_block();
void __threadfence_system();
void __nanosleep(unsigned ns);
void __trap();
int __all_sync(unsigned mask, int predicate);
int __any_sync(unsigned mask, int predicate);
unsigned __ballot_sync(unsigned mask, int predicate);
unsigned __activemask();
unsigned __match_any_sync(unsigned mask, unsigned value);
unsigned __match_any_sync(unsigned mask, int value);
unsigned __match_any_sync(unsigned mask, unsigned long long value);
unsigned __reduce_add_sync(unsigned mask, unsigned value);
unsigned __reduce_min_sync(unsigned mask, unsigned value);
unsigned __reduce_max_sync(unsigned mask, unsigned value);
int __reduce_add_sync(unsigned mask, int value);
int __reduce_min_sync(unsigned mask, int value);
int __reduce_max_sync(unsigned mask, int value);

// Functions that take every number.
#define FKJIT_NUMBER(type)                                                       \
  type __shfl_sync(unsigned mask, type value, int lane, int width = 32);         \
  type __shfl_up_sync(unsigned mask, type value, unsigned by, int width = 32);   \
  type __shfl_down_sync(unsigned mask, type value, unsigned by, int width = 32); \
  type __shfl_xor_sync(unsigned mask, type value, int lanes, int width = 32);
#define FKJIT_CACHED(type)           \
  type __ldg(const type* from);      \
  type __ldcg(const type* from);     \
  type __ldca(const type* from);     \
  type __ldcs(const type* from);     \
  type __ldlu(const type* from);     \
  type __ldcv(const type* from);     \
  void __stcg(type* to, type value); \
  void __stcs(type* to, type value); \
  void __stwb(type* to, type value); \
  void __stwt(type* to, type value);
#define FKJIT_ATOMIC(type)               \
  type atomicAdd(type* at, type value);  \
  type atomicExch(type* at, type value); \
  type atomicMin(type* at, type value);  \
  type atomicMax(type* at, type value);  \
  type atomicAnd(type* at, type value);  \
  type atomicOr(type* at, type value);   \
  type atomicXor(type* at, type value);  \
  type atomicCAS(type* at, type old, type value);
FKJIT_NUMBER(int)
FKJIT_NUMBER(unsigned)
FKJIT_NUMBER(long long)
FKJIT_NUMBER(unsigned long long)
FKJIT_NUMBER(float)
FKJIT_NUMBER(double)
FKJIT_CACHED(char)
FKJIT_CACHED(signed char)
FKJIT_CACHED(unsigned char)
FKJIT_CACHED(short)
FKJIT_CACHED(unsigned short)
FKJIT_CACHED(int)
FKJIT_CACHED(unsigned)
FKJIT_CACHED(long long)
FKJIT_CACHED(unsigned long long)
FKJIT_CACHED(float)
FKJIT_CACHED(double)
FKJIT_CACHED(int2)
FKJIT_CACHED(int4)
FKJIT_CACHED(uint2)
FKJIT_CACHED(uint4)
FKJIT_CACHED(float2)
FKJIT_CACHED(float4)
FKJIT_ATOMIC(int)
FKJIT_ATOMIC(unsigned)
FKJIT_ATOMIC(unsigned long long)
float atomicAdd(float* at, float value);
float atomicExch(float* at, float value);
double atomicAdd(double* at, double value);
unsigned atomicInc(unsigned* at, unsigned most);
unsigned atomicDec(unsigned* at, unsigned most);

// Numbers: constexpr where kernels compute constants with them.
#define FKJIT_ORDER(type, one, two)                                      \
  constexpr type min(one a, two b) { return (type)b < (type)a ? b : a; } \
  constexpr type max(one a, two b) { return (type)a < (type)b ? b : a; }
FKJIT_ORDER(int, int, int)
FKJIT_ORDER(unsigned, unsigned, unsigned)
FKJIT_ORDER(unsigned, int, unsigned)
FKJIT_ORDER(unsigned, unsigned, int)
FKJIT_ORDER(long, long, long)
FKJIT_ORDER(unsigned long, unsigned long, unsigned long)
FKJIT_ORDER(long long, long long, long long)
FKJIT_ORDER(unsigned long long, unsigned long long, unsigned long long)
FKJIT_ORDER(float, float, float)
FKJIT_ORDER(double, double, double)
int abs(int);
long long abs(long long);
float abs(float);
double abs(double);

#define FKJIT_ONE(name) \
  float name##f(float); \
  double name(double);  \
  float name(float);
#define FKJIT_TWO(name)        \
  float name##f(float, float); \
  double name(double, double); \
  float name(float, float);
FKJIT_ONE(sqrt)
FKJIT_ONE(rsqrt) FKJIT_ONE(cbrt) FKJIT_ONE(fabs) FKJIT_ONE(exp) FKJIT_ONE(exp2) FKJIT_ONE(exp10)
    FKJIT_ONE(expm1) FKJIT_ONE(log) FKJIT_ONE(log2) FKJIT_ONE(log10) FKJIT_ONE(log1p) FKJIT_ONE(sin)
        FKJIT_ONE(cos) FKJIT_ONE(tan) FKJIT_ONE(asin) FKJIT_ONE(acos) FKJIT_ONE(atan)
            FKJIT_ONE(sinh) FKJIT_ONE(cosh) FKJIT_ONE(tanh) FKJIT_ONE(erf) FKJIT_ONE(erfc)
                FKJIT_ONE(ceil) FKJIT_ONE(floor) FKJIT_ONE(trunc) FKJIT_ONE(round) FKJIT_ONE(rint)
                    FKJIT_TWO(fmax) FKJIT_TWO(fmin) FKJIT_TWO(fmod) FKJIT_TWO(pow) FKJIT_TWO(atan2)
                        FKJIT_TWO(copysign) float fmaf(float, float, float);
float fma(float, float, float);
double fma(double, double, double);
float ldexpf(float, int);
void sincosf(float, float* sine, float* cosine);
void sincospif(float, float* sine, float* cosine);
bool isinf(float);
bool isnan(float);
bool isfinite(float);
float __expf(float);
float __exp10f(float);
float __logf(float);
float __log2f(float);
float __log10f(float);
float __sinf(float);
float __cosf(float);
float __tanf(float);
float __tanhf(float);
void __sincosf(float, float* sine, float* cosine);
float __powf(float, float);
float __saturatef(float);
float __fdividef(float, float);
float __fdiv_rn(float, float);
float __frcp_rn(float);
float __fsqrt_rn(float);
float __frsqrt_rn(float);
float __fadd_rn(float, float);
float __fsub_rn(float, float);
float __fmul_rn(float, float);
float __fmaf_rn(float, float, float);

// Bits.
int __float_as_int(float);
unsigned __float_as_uint(float);
float __int_as_float(int);
float __uint_as_float(unsigned);
long long __double_as_longlong(double);
double __longlong_as_double(long long);
int __float2int_rn(float);
int __float2int_rd(float);
int __float2int_ru(float);
int __float2int_rz(float);
unsigned __float2uint_rn(float);
float __int2float_rn(int);
float __uint2float_rn(unsigned);
float __double2float_rn(double);
unsigned __byte_perm(unsigned low, unsigned high, unsigned selector);
unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by);
unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by);
unsigned __brev(unsigned);
unsigned long long __brevll(unsigned long long);
int __clz(int);
int __clzll(long long);
int __ffs(int);
int __ffsll(long long);
int __popc(unsigned);
int __popcll(unsigned long long);
int __mulhi(int, int);
unsigned __umulhi(unsigned, unsigned);
unsigned long long __umul64hi(unsigned long long, unsigned long long);
int __dp4a(int a, int b, int sum);
unsigned __dp4a(unsigned a, unsigned b, unsigned sum);
unsigned __vsetne4(unsigned, unsigned);
unsigned __vcmpeq4(unsigned, unsigned);
size_t __cvta_generic_to_shared(const void*);
size_t __cvta_generic_to_global(const void*);
size_t __cvta_generic_to_local(const void*);
long long clock64();
int printf(const char*, ...);
