// One weight: linear_clusters.cuh.
#include "linear_clusters.cuh"

CLUSTERS_KERNEL(linear_clusters_128_64, Product, 128, 64)
CLUSTERS_KERNEL(linear_clusters_128_96, Product, 128, 96)
CLUSTERS_KERNEL(linear_clusters_128_112, Product, 128, 112)
CLUSTERS_KERNEL(linear_clusters_256_64, Product, 256, 64)
CLUSTERS_KERNEL(linear_clusters_256_96, Product, 256, 96)
CLUSTERS_KERNEL(linear_clusters_256_112, Product, 256, 112)
