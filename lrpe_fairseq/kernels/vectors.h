// Rows of numbers as vectors of the processor; shared by the kernels in C++.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
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

// A (batch, head, time, width) tensor whose width is contiguous; strides in elements. No data: none.
struct Tensor {
    void *data;
    int64_t batch, head, time;
};

namespace {

template <typename T>
struct Lanes {
    typedef T Vector __attribute__((vector_size(BYTES)));
    typedef T Anywhere __attribute__((vector_size(BYTES), aligned(sizeof(T))));  // in memory
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

// Rows are short: a call of memcpy costs more than they do.
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
