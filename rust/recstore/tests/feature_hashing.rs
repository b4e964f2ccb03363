//! Ids made of strings, pairs, tokens and codes: the published values, and the same bits on any executor.

// tier: test

#![expect(clippy::unwrap_used, reason = "a refused call fails the test")]

use proptest::prelude::*;
use recstore::{
    Executor, IdInputError, NgramTables, PADDING_TOKEN, Serial, bucket_ids, check_prefix_sizes, cross_ids,
    hash_strings, hash_text, prefix_ids,
};

/// Several threads, whose bodies run one by one, the last first.
struct Backwards;

impl Executor for Backwards {
    fn for_each(&self, count: usize, body: &(dyn Fn(usize) + Sync)) {
        (0..count).rev().for_each(body);
    }
    fn num_threads(&self) -> usize {
        3
    }
}

fn strings(texts: &[&[u8]], seed: i64) -> Vec<i64> {
    let mut offsets = vec![0i64];
    offsets.extend(texts.iter().scan(0, |end, text| {
        *end += text.len() as i64;
        Some(*end)
    }));
    let mut ids = vec![0; texts.len()];
    hash_strings(&Serial, &texts.concat(), &offsets, seed, &mut ids).unwrap();
    ids
}

fn crossed(ids: &[&[i64]], seed: i64) -> Vec<i64> {
    let mut crossed = vec![0; ids[0].len()];
    cross_ids(&Serial, ids, seed, &mut crossed);
    crossed
}

fn ngrams(tokens: &[i64], length: usize, tables: &NgramTables, each: usize) -> Vec<i64> {
    let mut ids = vec![0; tokens.len() * each];
    tables.ids(&Serial, tokens, length, &mut ids);
    ids
}

fn prefixes(codes: &[i64], sizes: &[i64]) -> Result<Vec<i64>, IdInputError> {
    let mut ids = vec![0; codes.len()];
    prefix_ids(&Serial, codes, sizes, &mut ids).map(|()| ids)
}

fn buckets(ids: &[i64], count: i64, seed: i64) -> Result<Vec<i64>, IdInputError> {
    let mut bucketed = vec![0; ids.len()];
    bucket_ids(&Serial, ids, count, seed, &mut bucketed).map(|()| bucketed)
}

/// The table of docs/ids.md.
#[test]
fn published_values() {
    assert_eq!(strings(&[b"", b"a"], 0), [-2_152_535_657_050_944_081, 6_774_081_908_283_191_102]);
    assert_eq!(
        strings(&[b"12345678", b"123456789"], 0),
        [-8_945_296_240_283_771_741, 9_003_943_604_911_055_402]
    );
    assert_eq!(strings(&["Zürich, Bern and Zug".as_bytes()], 0), [-705_582_194_361_352_273]);
    assert_eq!(strings(&[b"a"], 1), [3_150_696_159_231_460_984]);
    assert_eq!(strings(&[b"\xff\x00"], -1), [3_053_735_779_593_518_510]);
    assert_eq!(crossed(&[&[0], &[0]], 0), [-6_411_193_824_288_604_561]);
    assert_eq!(crossed(&[&[1, 2], &[2, 1]], 0), [-4_838_594_755_968_170_389, -2_274_933_249_722_822_011]);
    assert_eq!(crossed(&[&[-1], &[i64::MAX], &[i64::MIN]], 0), [3_804_700_431_527_943_614]);
    assert_eq!(crossed(&[&[1], &[2]], 7), [-3_286_498_717_064_582_509]);
    let tables = |n, tables, vocab, seed| NgramTables::new(n, tables, vocab, seed).unwrap();
    assert_eq!(ngrams(&[5, 6, 5, 6], 4, &tables(2, 2, 1000, 0), 2), [208, 946, 311, 695, 341, 723, 311, 695]);
    assert_eq!(
        ngrams(&[5, 6], 1, &tables(3, 1, i64::MAX, -1), 1),
        [7_540_340_354_663_303_502, 6_613_939_878_657_518_547]
    );
    assert_eq!(ngrams(&[-7, i64::MAX], 2, &tables(1, 3, 97, 40), 3), [72, 16, 15, 10, 10, 61]);
    assert_eq!(prefixes(&[0, 0, 0, 2, 3, 1], &[3, 4, 2]).unwrap(), [0, 3, 15, 2, 14, 38]);
    assert_eq!(prefixes(&[(1 << 62) - 1, 0], &[1 << 62, 1]).unwrap(), [4_611_686_018_427_387_903, i64::MAX]);
    assert_eq!(buckets(&[0, 1, 2, -1], 1000, 0).unwrap(), [535, 465, 110, 936]);
    assert_eq!(
        buckets(&[1_234_567, i64::MIN], i64::MAX, 0).unwrap(),
        [6_457_827_717_110_365_317, 5_196_802_822_362_493_915]
    );
    assert_eq!(buckets(&[0, 1, 2, -1], 1000, 3).unwrap(), [327, 98, 944, 488]);
}

#[test]
fn executors_change_nothing() {
    const COUNT: usize = 150_000;
    let numbers: Vec<i64> = (0..COUNT as i64).map(|number| number * number - 7).collect();
    let characters: Vec<u8> = numbers.iter().map(|&number| number as u8).collect();
    let offsets: Vec<i32> = (0..=COUNT as i32).collect();
    let codes: Vec<i64> = numbers.iter().map(|number| number & 7).collect();
    let tables = NgramTables::new(3, 2, 1000, 5).unwrap();
    let made = |executor: &dyn Executor| {
        let mut ids = vec![vec![0; COUNT]; 4];
        hash_strings(executor, &characters, &offsets, 5, &mut ids[0]).unwrap();
        cross_ids(executor, &[&numbers, &codes], 5, &mut ids[1]);
        prefix_ids(executor, &codes, &[8, 8, 8], &mut ids[2]).unwrap();
        bucket_ids(executor, &numbers, 1000, 5, &mut ids[3]).unwrap();
        let mut rows = vec![0; COUNT * 2];
        tables.ids(executor, &numbers, 10_000, &mut rows);
        (ids, rows)
    };
    assert_eq!(made(&Serial), made(&Backwards));
}

#[test]
fn what_ids_cannot_be_made_of_is_refused() {
    let offsets = |offsets: &[i32]| {
        hash_strings(&Serial, b"Bern", offsets, 0, &mut vec![0; offsets.len() - 1]).unwrap_err()
    };
    assert_eq!(offsets(&[0, 3, 1]), IdInputError::Offset { offset: 1, position: 2, least: 3, most: 4 });
    assert_eq!(offsets(&[0, 5]).to_string(), "hash_strings: offset 5 at position 1 is not from 0 to 4");
    assert_eq!(
        buckets(&[1], -3, 0).unwrap_err().to_string(),
        "bucket_ids: buckets must be from 1 to 9223372036854775807, got -3"
    );
    assert_eq!(
        NgramTables::new(1, 1025, 9, 0).unwrap_err().to_string(),
        "ngram_ids: tables must be from 1 to 1024, got 1025"
    );
    assert_eq!(
        prefixes(&[0, 4], &[3, 4]).unwrap_err(),
        IdInputError::Code { code: 4, position: 1, level: 1, size: 4 }
    );
    assert_eq!(check_prefix_sizes(&[3, -1]).unwrap_err(), IdInputError::Size { level: 1, size: -1 });
    let sizes = vec![i64::MAX, i64::MAX, i64::MAX];
    assert_eq!(check_prefix_sizes(&sizes).unwrap_err(), IdInputError::Prefixes { sizes, level: 1 });
    assert_eq!(check_prefix_sizes(&[1 << 62, 1]), Ok(()));
}

proptest! {
    #[test]
    fn strings_have_the_hash_of_each_alone(
        texts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
        seed in any::<i64>(),
    ) {
        let slices: Vec<&[u8]> = texts.iter().map(Vec::as_slice).collect();
        let expected: Vec<i64> = texts.iter().map(|text| hash_text(text, seed) as i64).collect();
        prop_assert_eq!(strings(&slices, seed), expected);
    }

    #[test]
    fn an_ngram_has_the_upper_half_of_the_cross_of_its_tokens(
        tokens in prop::collection::vec(any::<i64>(), 12),
        n in 1usize..6,
        vocab in 1i64..,
        seed in any::<i64>(),
    ) {
        const LENGTH: usize = 4;
        let rows = ngrams(&tokens, LENGTH, &NgramTables::new(n as i64, 1, vocab, seed).unwrap(), 1);
        for (place, &row) in rows.iter().enumerate() {
            let before = place % LENGTH;
            let token = |age: usize| if age > before { PADDING_TOKEN } else { tokens[place - age] };
            let gram: Vec<[i64; 1]> = (0..n).rev().map(|age| [token(age)]).collect();
            let gram: Vec<&[i64]> = gram.iter().map(<[i64; 1]>::as_slice).collect();
            let hash = crossed(&gram, seed)[0] as u64;
            prop_assert_eq!(row, ((u128::from(hash) * vocab as u128) >> 64) as i64);
        }
    }
}
