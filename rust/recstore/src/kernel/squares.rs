//! Sums of squares over the elements of rows. They are added in one order on every machine.

/// The number of running sums: fixed, so that kernels for all instructions add in the same order.
const LANES: usize = 16;

const HALF: usize = LANES / 2;

/// What is made of an element's inputs and squared. `of` must be `#[inline(always)]`.
pub(crate) trait Squared<const INPUTS: usize> {
    /// Returns what is squared.
    fn of(&self, inputs: [f32; INPUTS]) -> f32;
}

/// The elements of one row as they are.
pub(crate) struct Plain;

impl Squared<1> for Plain {
    #[inline(always)]
    fn of(&self, [value]: [f32; 1]) -> f32 {
        value
    }
}

/// Returns the sum of the squares of what `value` makes of the elements of rows, which are as long as the first one.
///
/// # Panics
/// If a row is shorter than the first one.
#[inline(always)]
pub(crate) fn sum_of_squares<const INPUTS: usize>(
    inputs: [&[f32]; INPUTS],
    value: &impl Squared<INPUTS>,
) -> f32 {
    let count = inputs.first().map_or(0, |input| input.len());
    let (mut lanes, mut start) = ([0.0; LANES], 0);
    // Over copies of known length. Over indices, whose checks left half of the elements to a loop of single
    // ones, a step of LAMB took 2.0 times that of AdaGrad (dim 64), and 1.3 times since.
    while start + LANES <= count {
        add(&mut lanes, piece(inputs, start), value);
        start += LANES;
    }
    let [mut low, mut high] = halves(&lanes);
    if start + HALF > count {
        low = with_singles(low, inputs, start, value);
    } else {
        add(&mut low, piece(inputs, start), value);
        high = with_singles(high, inputs, start + HALF, value);
    }
    let eight = sums(&low, &high);
    let [low, high]: [[f32; 4]; 2] = halves(&eight);
    let four = sums(&low, &high);
    let [low, high]: [[f32; 2]; 2] = halves(&four);
    let [one, other] = sums(&low, &high);
    one + other
}

/// Adds what is left of rows, less than a half, to its lanes. They go in and out by value: an array of which a part is
/// named when the program runs lies in memory, and so would the sums of all rows.
#[inline(always)]
fn with_singles<const INPUTS: usize>(
    mut lanes: [f32; HALF],
    inputs: [&[f32]; INPUTS],
    start: usize,
    value: &impl Squared<INPUTS>,
) -> [f32; HALF] {
    let count = inputs.first().map_or(0, |input| input.len());
    for (place, lane) in (start..count).zip(&mut lanes) {
        add(std::array::from_mut(lane), piece(inputs, place), value);
    }
    lanes
}

/// Returns some elements of each row: copies, whose length the compiler knows.
#[inline(always)]
fn piece<const LEN: usize, const INPUTS: usize>(
    inputs: [&[f32]; INPUTS],
    start: usize,
) -> [[f32; LEN]; INPUTS] {
    let mut piece = [[0.0; LEN]; INPUTS];
    for (own, input) in piece.iter_mut().zip(inputs) {
        own.copy_from_slice(&input[start..start + LEN]);
    }
    piece
}

#[inline(always)]
fn add<const LEN: usize, const INPUTS: usize>(
    lanes: &mut [f32; LEN],
    piece: [[f32; LEN]; INPUTS],
    value: &impl Squared<INPUTS>,
) {
    for (place, lane) in lanes.iter_mut().enumerate() {
        let mut own = [0.0; INPUTS];
        for (own, row) in own.iter_mut().zip(&piece) {
            *own = row[place];
        }
        let value = value.of(own);
        *lane += value * value;
    }
}

#[inline(always)]
fn halves<const LEN: usize, const HALF: usize>(lanes: &[f32; LEN]) -> [[f32; HALF]; 2] {
    let mut halves = [[0.0; HALF]; 2];
    halves[0].copy_from_slice(&lanes[..HALF]);
    halves[1].copy_from_slice(&lanes[HALF..]);
    halves
}

#[inline(always)]
fn sums<const LEN: usize>(one: &[f32; LEN], other: &[f32; LEN]) -> [f32; LEN] {
    let mut sums = [0.0; LEN];
    for place in 0..LEN {
        sums[place] = one[place] + other[place];
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_taken_once() {
        for count in [0, 1, 7, 8, 9, 15, 16, 17, 24, 31, 64, 100] {
            let values: Vec<f32> = (0..count).map(|j| j as f32).collect();
            let sum = (0..count).map(|j| (j * j) as f32).sum::<f32>();
            assert_eq!(sum_of_squares([&values], &Plain), sum);
        }
    }

    struct Difference;

    impl Squared<2> for Difference {
        fn of(&self, [one, other]: [f32; 2]) -> f32 {
            one - other
        }
    }

    #[test]
    fn each_element_goes_with_the_others_of_its_place() {
        let (one, other): (Vec<f32>, Vec<f32>) = (0..29).map(|j| ((3 * j) as f32, (2 * j) as f32)).unzip();
        assert_eq!(sum_of_squares([&one, &other], &Difference), (0..29).map(|j| (j * j) as f32).sum::<f32>());
    }

    /// The order, written as a plain loop.
    fn in_order(values: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        values.iter().enumerate().for_each(|(place, value)| lanes[place % LANES] += value * value);
        for width in [8, 4, 2, 1] {
            (0..width).for_each(|lane| lanes[lane] += lanes[lane + width]);
        }
        lanes[0]
    }

    #[test]
    fn sums_are_those_of_the_order_to_the_bit() {
        for count in 0..70 {
            let values: Vec<f32> = (0..count).map(|j| (j as f32 * 0.7).sin() * 10f32.powi(j % 5)).collect();
            assert_eq!(sum_of_squares([&values], &Plain).to_bits(), in_order(&values).to_bits(), "{count}");
        }
    }
}
