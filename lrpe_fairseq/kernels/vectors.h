// SIMD vectors, and structs that are filled in by Python. Used by all C++ kernels.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

#if defined(VECTOR_BYTES)
constexpr int BYTES = VECTOR_BYTES;
#elif defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif

// A field of a struct that is filled in by Python. loader.py makes its struct from a table of these.
struct Field {
    const char *name, *kind;
};

template <typename T>
constexpr const char *kind_of() {
    if (std::is_same<T, int64_t>::value) return "int64";
    if (std::is_same<T, double>::value) return "double";
    return std::is_pointer<T>::value ? "pointer" : "Tensor";
}

// Define struct NAME and its table of fields from a list FIELDS(F) of F(NAME, type, field). The last
// row of the table has no name.
#define DECLARE_FIELD(NAME, TYPE, FIELD) TYPE FIELD;
#define DESCRIBE_FIELD(NAME, TYPE, FIELD) {#FIELD, kind_of<TYPE>()},
#define DEFINE_STRUCT(NAME, FIELDS, TABLE) \
    struct NAME {                          \
        FIELDS(DECLARE_FIELD)              \
    };                                     \
    extern "C" const Field TABLE[];        \
    const Field TABLE[] = {FIELDS(DESCRIBE_FIELD){nullptr, nullptr}};

// A (batch, head, time, width) tensor with a contiguous last axis. Strides are in elements. data is
// null if there is no tensor.
typedef void *Pointer;
#define TENSOR_FIELDS(F)      \
    F(Tensor, Pointer, data)  \
    F(Tensor, int64_t, batch) \
    F(Tensor, int64_t, head)  \
    F(Tensor, int64_t, time)
DEFINE_STRUCT(Tensor, TENSOR_FIELDS, tensor_fields)

namespace {

template <typename T>
struct Lanes {
    typedef T Vector __attribute__((vector_size(BYTES)));
    typedef T Anywhere __attribute__((vector_size(BYTES), aligned(sizeof(T))));  // unaligned
    static constexpr int COUNT = BYTES / sizeof(T);
    static int filled(int64_t width) { return int((width + COUNT - 1) / COUNT * COUNT); }
    static Vector &at(T *x) { return *reinterpret_cast<Vector *>(x); }
    static const Vector &at(const T *x) { return *reinterpret_cast<const Vector *>(x); }
};

template <int STEP, typename V, int... J>
inline V folded(V x, std::integer_sequence<int, J...> order) {
    if constexpr (STEP == 0) return x;
    else return folded<STEP / 2>(x + __builtin_shufflevector(x, x, (J ^ STEP)...), order);
}

template <typename T>
T total(typename Lanes<T>::Vector x) {
    constexpr int N = Lanes<T>::COUNT;
    return folded<N / 2>(x, std::make_integer_sequence<int, N>{})[0];
}

template <typename T>
T dot(const T *a, const T *b, int width) {
    using L = Lanes<T>;
    typename L::Vector sum{};
    for (int j = 0; j < width; j += L::COUNT) sum += L::at(a + j) * L::at(b + j);
    return total<T>(sum);
}

// y += factor x
template <typename T>
void add(T *y, const T *x, T factor, int width) {
    for (int j = 0; j < width; j += Lanes<T>::COUNT)
        Lanes<T>::at(y + j) += factor * Lanes<T>::at(x + j);
}

// Copy a short row. For these a call of memcpy takes longer than the copy.
template <typename T>
inline void copy(T *to, const T *from, int64_t width) {
    using L = Lanes<T>;
    int64_t j = 0;
    for (; j + L::COUNT <= width; j += L::COUNT)
        reinterpret_cast<typename L::Anywhere &>(to[j]) =
            reinterpret_cast<const typename L::Anywhere &>(from[j]);
    for (; j < width; j++) to[j] = from[j];
}

template <typename T>
void scale(T *x, T factor, int64_t width) {
    for (int64_t j = 0; j < width; j += Lanes<T>::COUNT) Lanes<T>::at(x + j) *= factor;
}

}  // namespace
