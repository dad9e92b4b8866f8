#include "linear_clusters.cuh"

// One weight in a launch.
CLUSTERS_KERNEL(linear_clusters_128_64, Product, 128, 64)
CLUSTERS_KERNEL(linear_clusters_128_96, Product, 128, 96)
CLUSTERS_KERNEL(linear_clusters_128_112, Product, 128, 112)
CLUSTERS_KERNEL(linear_clusters_256_64, Product, 256, 64)
CLUSTERS_KERNEL(linear_clusters_256_96, Product, 256, 96)
CLUSTERS_KERNEL(linear_clusters_256_112, Product, 256, 112)

// Several weights of one input.
CLUSTERS_KERNEL(linear_clusters_128_64_together, Together, 128, 64)
CLUSTERS_KERNEL(linear_clusters_128_96_together, Together, 128, 96)
CLUSTERS_KERNEL(linear_clusters_128_112_together, Together, 128, 112)
CLUSTERS_KERNEL(linear_clusters_256_64_together, Together, 256, 64)
CLUSTERS_KERNEL(linear_clusters_256_96_together, Together, 256, 96)
CLUSTERS_KERNEL(linear_clusters_256_112_together, Together, 256, 112)
