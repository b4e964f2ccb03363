//! Reading rows against `index_select`, for ids of any shape, strides and integer type.

// tier: all

use recstore_tch::Result;
use recstore_tests::{all_ids, open};
use tch::{Device, Kind, Tensor};

const ROWS: i64 = 50;
const DIM: usize = 5;

/// Ids of many shapes and strides, with duplicates.
fn many_ids() -> Vec<Tensor> {
    let ids = |shape: &[i64]| Tensor::randint(ROWS, shape, (Kind::Int64, Device::Cpu));
    vec![
        ids(&[]),
        ids(&[0]),
        ids(&[1]),
        ids(&[3000]),
        ids(&[4, 6]),
        ids(&[2, 0, 3]),
        ids(&[2, 3, 4, 5]),
        ids(&[4, 6]).transpose(0, 1),
        ids(&[40]).slice(0, 3, 30, 4),
        ids(&[2, 9]).narrow(1, 2, 5),
        ids(&[1, 6]).expand([4, 6], false),
        ids(&[7]).flip([0i64]),
        ids(&[3, 3]).to_kind(Kind::Int),
    ]
}

#[test]
fn rows_are_those_of_index_select_in_the_shape_of_the_ids() -> Result<()> {
    tch::manual_seed(3);
    let table = open(DIM, r#"{"kind": "sgd"}"#)?;
    table.update(&all_ids(ROWS / 2), &Tensor::randn([ROWS / 2, DIM as i64], (Kind::Float, Device::Cpu)))?;
    let weight = table.read(&all_ids(ROWS))?;
    for ids in many_ids() {
        let shape = [ids.size(), vec![DIM as i64]].concat();
        let expected = weight.index_select(0, &ids.reshape([-1])).view(shape.as_slice());
        assert!(table.read(&ids)?.equal(&expected), "{:?}", ids.size());
    }
    Ok(())
}

#[test]
fn what_was_written_is_read_whatever_the_strides() -> Result<()> {
    tch::manual_seed(4);
    let table = open(DIM, r#"{"kind": "sgd"}"#)?;
    let ids = all_ids(24).view([4, 6]).transpose(0, 1);
    let rows = Tensor::randn([DIM as i64, 6, 4], (Kind::Float, Device::Cpu)).permute([1, 2, 0]);
    assert!(!ids.is_contiguous() && !rows.is_contiguous());
    table.write(&ids, &rows)?;
    assert!(table.read(&ids)?.equal(&rows));
    assert!(table.read(&all_ids(24))?.equal(&rows.transpose(0, 1).reshape([24, DIM as i64])));
    Ok(())
}

#[test]
fn both_ends_of_int64_are_ids_like_any_other() -> Result<()> {
    let table = open(DIM, r#"{"kind": "sgd", "lr": 1}"#)?;
    let ids = Tensor::from_slice(&[i64::MIN, -1, 0, i64::MAX]);
    let before = table.read(&ids)?;
    table.update(&ids, &before)?;
    assert_eq!(table.read(&ids)?.abs().max().double_value(&[]), 0.0);
    assert_eq!(table.delete(&ids)?, 4);
    assert!(table.read(&ids)?.equal(&before));
    Ok(())
}
