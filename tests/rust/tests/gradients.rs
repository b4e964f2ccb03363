//! Merging gradients gives the bits of `torch.unique` and `index_add`.

// tier: all

use proptest::prelude::*;
use recstore::{GradientChunk, Serial, merge_gradients, unique};
use recstore_tests::elements;
use tch::{Device, Kind, Tensor};

fn ids() -> impl Strategy<Value = Vec<i64>> {
    let id = prop_oneof![4 => -5..5i64, 1 => Just(i64::MIN), 1 => Just(i64::MAX), 1 => any::<i64>()];
    prop::collection::vec(id, 0..300)
}

/// Returns distinct ids, each input's place among them and the summed rows, as libtorch has them.
fn by_libtorch(ids: &Tensor, gradients: &Tensor, dim: usize) -> (Vec<i64>, Vec<i64>, Vec<u32>) {
    let (distinct, inverse, _) = ids.internal_unique2(true, true, false);
    let zeros = Tensor::zeros([distinct.size()[0], dim as i64], (Kind::Float, Device::Cpu));
    let sums = zeros.index_add(0, &inverse, gradients);
    (elements(&distinct), elements(&inverse), bits(&elements(&sums.view([-1]))))
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

proptest! {
    #[test]
    fn merged_gradients_have_the_bits_of_index_add(ids in ids(), dim in 1..40usize, seed in 0..1000i64) {
        tch::manual_seed(seed);
        let gradients = Tensor::randn([ids.len() as i64, dim as i64], (Kind::Float, Device::Cpu));
        let (distinct, inverse, sums) = by_libtorch(&Tensor::from_slice(&ids), &gradients, dim);
        let gradients: Vec<f32> = elements(&gradients);
        let merged = merge_gradients(&Serial, dim, &[GradientChunk::new(&ids, &gradients, dim)]).unwrap();
        let (mut found, mut places) = (vec![0; ids.len()], vec![0; ids.len()]);
        let count = unique(&Serial, &ids, &mut found, &mut places);
        prop_assert_eq!(&merged.ids, &found[..count]);
        prop_assert_eq!((merged.ids, bits(&merged.sums), places), (distinct, sums, inverse));
    }
}

#[test]
fn many_gradients_of_few_ids_have_the_bits_of_index_add() {
    tch::manual_seed(5);
    let (count, dim) = (50_000, 17);
    let ids = Tensor::randint(300, [count], (Kind::Int64, Device::Cpu)) - 150;
    let gradients = Tensor::randn([count, dim], (Kind::Float, Device::Cpu));
    let (distinct, _, sums) = by_libtorch(&ids, &gradients, dim as usize);
    let (ids, gradients) = (elements::<i64>(&ids), elements::<f32>(&gradients));
    let merged =
        merge_gradients(&Serial, dim as usize, &[GradientChunk::new(&ids, &gradients, dim as usize)])
            .unwrap();
    assert_eq!(merged.ids, distinct);
    assert!(bits(&merged.sums) == sums);
}
