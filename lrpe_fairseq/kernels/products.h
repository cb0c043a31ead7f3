// Products of small matrices that fit a core's cache. Used by all C++ kernels.

#pragma once

#include "vectors.h"

// A tile of a product has ROWS rows of one or two vectors, so that it fits the registers.
#if defined(__aarch64__)
constexpr int ROWS = 8;
#else
constexpr int ROWS = BYTES == 64 ? 8 : 4;
#endif

namespace {

// A row-major matrix. `transposed` returns a view for the left operand of a product.
template <typename T>
struct Matrix {
    T *data;
    int row, column = 1;
    T *operator[](int i) const { return data + int64_t(i) * row; }
    typename Lanes<T>::Vector &at(int i, int j) const { return Lanes<T>::at((*this)[i] + j); }
    Matrix transposed() const { return {data, column, row}; }
};

// The structure of c = a b. LOWER: compute c on and below the diagonal only. LEFT_LOWER, LEFT_UPPER:
// a is lower or upper triangular.
enum Shape { FULL, LOWER, LEFT_LOWER, LEFT_UPPER };

// Compute ROWS rows and W vectors of c = a b, or c += a b, over inner indices first to last - 1.
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

// Compute c (rows x columns) = a (rows x inner) b (inner x columns), or c += a b.
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

// One allocation for several matrices, each aligned to a cache line.
template <typename T>
class Workspace {
  public:
    explicit Workspace(int64_t elements)  // total number of elements, without padding
        : elements_(elements + 32 * 64 / sizeof(T)),
          data_(static_cast<T *>(std::aligned_alloc(64, bytes(elements_)))) {}
    ~Workspace() { std::free(data_); }
    Workspace(const Workspace &) = delete;
    Workspace &operator=(const Workspace &) = delete;
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
