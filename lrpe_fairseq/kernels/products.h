// Products of matrices in the cache of a core; shared by the kernels in C++.

#pragma once

#include "vectors.h"

// A tile of a product is ROWS rows of one or two vectors: it fits the registers.
#if defined(__aarch64__)
constexpr int ROWS = 8;
#else
constexpr int ROWS = BYTES == 64 ? 8 : 4;
#endif

namespace {

// A matrix in the cache, row by row; `transposed` is a view for the left side of a product.
template <typename T>
struct Matrix {
    T *data;
    int row, column = 1;
    T *operator[](int i) const { return data + int64_t(i) * row; }
    typename Lanes<T>::Vector &at(int i, int j) const { return Lanes<T>::at((*this)[i] + j); }
    Matrix transposed() const { return {data, column, row}; }
};

// What of c = a b is wanted or not zero. LOWER: c on and below the diagonal. LEFT_LOWER: a is lower
// triangular. LEFT_UPPER: a is upper triangular.
enum Shape { FULL, LOWER, LEFT_LOWER, LEFT_UPPER };

// ROWS rows and W vectors of c = a b, or c += a b, over the inner indices first to last.
template <int W, bool ADD, typename T>
inline void tile(Matrix<T> c, Matrix<T> a, Matrix<T> b, int first, int last) {
    using L = Lanes<T>;
    typename L::Vector sum[ROWS][W];
    for (int i = 0; i < ROWS; i++)
        for (int w = 0; w < W; w++)
            sum[i][w] = ADD ? L::at(c[i] + w * L::COUNT) : typename L::Vector{};
    for (int n = first; n < last; n++) {
        typename L::Vector right[W];
        for (int w = 0; w < W; w++) right[w] = L::at(b[n] + w * L::COUNT);
        for (int i = 0; i < ROWS; i++)
            for (int w = 0; w < W; w++)
                sum[i][w] += a.data[int64_t(i) * a.row + int64_t(n) * a.column] * right[w];
    }
    for (int i = 0; i < ROWS; i++)
        for (int w = 0; w < W; w++) L::at(c[i] + w * L::COUNT) = sum[i][w];
}

// c (rows x columns) = a (rows x inner) b (inner x columns), or c += a b.
template <Shape SHAPE, bool ADD, typename T>
void product(Matrix<T> c, Matrix<T> a, Matrix<T> b, int rows, int inner, int columns) {
    constexpr int LANES = Lanes<T>::COUNT;
    for (int j = 0; j < columns; j += 2 * LANES)
        for (int i = 0; i < rows; i += ROWS) {
            const int end = SHAPE == LOWER ? std::min(columns, i + ROWS) : columns;
            if (j >= end) continue;
            const int first = SHAPE == LEFT_UPPER ? i : 0;
            const int last = SHAPE == LEFT_LOWER ? std::min(inner, i + ROWS) : inner;
            const Matrix<T> to{c[i] + j, c.row}, with{b.data + j, b.row};
            const Matrix<T> from{a.data + int64_t(i) * a.row, a.row, a.column};
            if (j + LANES < end)
                tile<2, ADD>(to, from, with, first, last);
            else
                tile<1, ADD>(to, from, with, first, last);
        }
}

// Rooms in the cache, each at the start of a line, handed out one after the other.
template <typename T>
class Rooms {
  public:
    explicit Rooms(int64_t elements)  // and what lies between them
        : elements_(elements + 32 * 64 / sizeof(T)),
          data_(static_cast<T *>(std::aligned_alloc(64, bytes(elements_)))) {}
    ~Rooms() { std::free(data_); }
    Rooms(const Rooms &) = delete;
    Rooms &operator=(const Rooms &) = delete;
    Matrix<T> matrix(int rows, int columns) {
        T *here = data_ + used_;
        used_ += bytes(int64_t(rows) * columns) / sizeof(T);
        return {here, columns};
    }
    void clear() { std::memset(data_, 0, bytes(elements_)); }

  private:
    static int64_t bytes(int64_t elements) { return (elements * sizeof(T) + 63) / 64 * 64; }
    int64_t elements_, used_ = 0;
    T *data_;
};

}  // namespace
